"""Engines in the pods of a Kubernetes cluster, reached with the `kubectl` and the credentials of the user."""
