"""The area that two rotated rectangles share: one definition per backend, for every operator that needs it.

A rectangle is `(x, y, width, height, angle)`. Its *frame* is what the area needs of it: centre, half sizes, cosine and
sine, how far it reaches along x and y, and its own area. All three backends compute with the same IEEE operations in
the same order, so they agree to the last bit, and a suppression that compares an overlap with a threshold keeps the
same boxes everywhere.

Two forms:

margin 0     The area itself. In the axes of the second rectangle a vertical line cuts the common part in
             `clamp(top) - clamp(bottom)`, where top and bottom are the first rectangle's and the clamp is to the
             second's y range. So the area is the integral of the clamped y along the four edges of the first, over the
             second's x range: no polygon is built, nothing is sorted, and nothing jumps where edges coincide.
margin > 0   What mmcv's and OpenPCDet's bird's-eye operators compute: the polygon through the points where edges cross
             and the corners that lie within `margin` of the other rectangle, sorted by angle around their mean.
"""
