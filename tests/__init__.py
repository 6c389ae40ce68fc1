"""Tests of smartcache; the folders mirror the package."""
