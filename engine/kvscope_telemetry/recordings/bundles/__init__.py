"""How state lies in a recording: frames of a second side by side, keyframes and leaps without what is told twice."""
