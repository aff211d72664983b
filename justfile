default:
    @just --list

setup:
    @true
