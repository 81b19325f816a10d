"""Kasmina changes topology: hosts, slots, seeds, their life, saving and export. It does not know why."""

from esper.kasmina.blueprints import BLUEPRINTS, Blueprint, blueprints_for, get_blueprint
from esper.kasmina.export import export_model, export_module
from esper.kasmina.hosts import CNNHost, Host, HostSpec, MLPHost, TransformerHost, build_host
from esper.kasmina.lifecycle import (
    EpochMeasurement,
    advance_active_seed,
    apply_op,
    begin_epoch,
    end_epoch,
    resolve_target_slot,
)
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.network import GrowingNetwork, ParamCounts
from esper.kasmina.persist import ModelState, capture, load_model, restore, save_model
from esper.kasmina.slot import SeedSlot
from esper.kasmina.wrap import wrap_sequential
