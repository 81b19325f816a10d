"""Tamiyo: watches, decides, learns nothing by itself. Signals, observations, legality, rules. No torch."""

from esper.tamiyo.controller import Controller, Setting
from esper.tamiyo.controllers import CONTROLLERS, make_controller
from esper.tamiyo.tracker import SignalTracker
