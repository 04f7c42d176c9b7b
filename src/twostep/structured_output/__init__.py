"""Grammars: constraints compiled by llguidance, and the tokens they allow."""
