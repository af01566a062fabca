"""The acceptance standard: is every kernel right, by how much is it off, and how near is it to what the machine can do.

diffs.py      how far a result is from its baseline: four measures and the places of NaN and inf
standard.py   when that is good enough, and how near to the machine's limits a case should come
ceilings.py   what the machine can do, measured
timing.py     how long a call takes
stability.py  whether a call gives the same bits again
workspace.py  how much memory a call takes beside its inputs and outputs
baseline.py   what cases took before, and what they may take now
runner.py     every sample through every kernel
command.py    what `triops check` and `triops replay` do
guards.py     memory that shows what a kernel writes outside of its buffers, and what it does not write
soak/         random calls of everything, for as long as you like; sanitize.py runs them under compute-sanitizer
case_file.py  one call in one file; record.py writes such files from a running program
shapes.py     a tensor described by shape, dtype, strides, value ranges and a seed
report.py     report.html and report.json
"""
