"""What it means to be inside a box: one definition per backend, for every operator that needs it.

A box is `(cx, cy, cz, dx, dy, dz, heading)`. Its *frame* is what the test needs of it: the centre, the
half sizes (with the margin), and the cosine and sine of the heading. All three backends compute frame
and test with the same IEEE operations in the same order, so they agree to the last bit. That includes
cosine and sine, which no two math libraries round alike: they are computed here by the same polynomials.
"""
