"""The command line. Commands put parts together; no algorithm lives here."""
