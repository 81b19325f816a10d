"""Tamiyo: watches, decides, learns nothing by itself. Signals, observations, legality, rules. No torch."""

from esper.tamiyo.controller import Controller
from esper.tamiyo.controllers import CONTROLLERS, make_controller
from esper.tamiyo.situation import Setting
from esper.tamiyo.tracker import SignalTracker

__all__ = ["CONTROLLERS", "Controller", "Setting", "SignalTracker", "make_controller"]
