"""The version of this package, which its metadata and its pages state."""

VERSION = "0.1.0"
