"""Plug-ins for engines, one module each; importing one needs the engine that it is for."""
