"""SQL queries over the tables of a recording."""
