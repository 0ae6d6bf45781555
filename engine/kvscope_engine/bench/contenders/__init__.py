"""What `bench decode` compares: our engine and its peers, behind one small interface."""
