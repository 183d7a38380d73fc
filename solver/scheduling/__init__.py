"""Scheduling: conversion of decisions to actions in order, and the rules for a valid order."""
