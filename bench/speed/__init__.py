"""How fast the parts of a run are: rows that are measured in turns with a peer, each with a goal and a floor."""
