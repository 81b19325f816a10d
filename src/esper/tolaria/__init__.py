"""Tolaria runs hosts: batches, optimizers, devices. It knows no policy, no reward and no seed."""
