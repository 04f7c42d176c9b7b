"""Logits to tokens: the rules (``reference``) and how a request's parameters reach the device."""
