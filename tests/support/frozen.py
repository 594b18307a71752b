"""Has what is loaded by now never looked at for garbage, which a forked program would copy: a second of a processor."""

import gc

gc.collect()
# At a program's end triton then says what was not freed, which is none of the program's.
gc.freeze()
