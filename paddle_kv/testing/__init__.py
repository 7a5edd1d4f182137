"""What a user needs to prove an extension of his own: the simulator, random traffic, the clairvoyant optimum."""
