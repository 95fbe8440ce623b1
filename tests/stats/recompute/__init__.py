"""Delta_end, E and R of a study from its records: a second implementation, in numpy.

It follows the formulas of docs/statistics.md and of the headers in src/stats, and shares no code
with src/stats.

    records    reads the records of a folder into a study
    study      decides which budgets can be compared, and computes the three numbers
    curve      the curve through the rungs of the reference
    intervals  Student's t, the variance of documents, and simultaneous intervals
"""
