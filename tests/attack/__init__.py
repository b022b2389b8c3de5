"""Attacks of one tenant on a real stack, while another tenant's requests are timed."""
