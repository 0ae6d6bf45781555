"""Programs that the benchmarks compare: our engine and its peers, behind one small interface (`measure.Contender`)."""
