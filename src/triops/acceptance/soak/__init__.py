"""The soak: random calls, right and malformed, of every operator and public function, for as long as you like.

mutate.py   one argument made odd: other strides, NaN, hostile indices, wrong types
public.py   the public functions, called with what the operators' samples hold
calls.py    one call, drawn from its target, backend and seed, and from nothing else
execute.py  some calls at once, in guarded memory, on threads, streams and in CUDA graphs, and what is wrong with them
workers.py  processes that run them, so that a crash or a hang is a finding too
summary.py  what was found, as a table and as JSON
command.py  `python -m triops.acceptance.soak`

`triops.acceptance.sanitize` runs the same calls under compute-sanitizer.
"""
