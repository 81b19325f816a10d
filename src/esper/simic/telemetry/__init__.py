"""What training tells: emitters, alarms, levels. Numbers in, events out; nothing here changes a trained bit."""
