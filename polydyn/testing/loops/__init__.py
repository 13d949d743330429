"""Execute the loop IR of kernels in numpy: the meaning of every node, value and leaf function.

It shares no code with the printers: a kernel that computes the right results here and the wrong ones when compiled has
a fault in a printer, a leaf or the C compiler; a kernel that computes the wrong results here has one in a pass.
"""
