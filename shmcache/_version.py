"""The one place where the version is written; pyproject and the compiled module read it from here."""

__version__ = "0.1.0"
