"""The ZeRO replication study: train under many strategies, record, compare, and judge published claims."""
