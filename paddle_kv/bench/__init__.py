"""The benchmark behind ``paddle-kv bench``: every speed claim of this project is made with it."""
