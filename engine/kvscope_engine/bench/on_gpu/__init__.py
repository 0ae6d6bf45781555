"""What `bench gpu` measures, and what all of it is measured on."""
