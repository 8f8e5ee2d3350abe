"""Owns the shipped trace excerpt; see NOTICE.md for where it comes from and its licence."""
