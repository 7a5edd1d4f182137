"""Which block is in use by what, and under which lock that changes. Imports no Paddle, knows no scheduler."""
