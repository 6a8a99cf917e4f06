"""Measuring `cute_matmul`: run.py makes results, render.py makes tables and plots of them.

Part of a checkout, not of the installed package. The scripts also run as `python -m perf.run` and so on.
"""
