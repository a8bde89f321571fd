"""Jobs for torchrun, Slurm, Ray, SkyPilot and Kubernetes."""
