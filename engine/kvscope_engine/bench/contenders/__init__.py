"""Programs that the benchmarks compare: kvscope's engine and its peers, behind one small interface
(`measure.Contender`).
"""
