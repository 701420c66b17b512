"""Drafts tokens that a step verifies beside a sequence's newest one."""
