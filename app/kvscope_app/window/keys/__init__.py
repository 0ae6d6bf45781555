"""Which keys do what: the person's choices over the actions' own, and the sheet where they are changed."""
