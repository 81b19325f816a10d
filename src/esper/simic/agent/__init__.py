"""The learner: recurrent masked PPO over factored actions. It knows no hosts, no workers and no reward terms."""
