"""What a prefix cache would have found: traces of requests, replays of them, the clairvoyant optimum."""
