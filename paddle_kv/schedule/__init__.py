"""Transfers and their order."""
