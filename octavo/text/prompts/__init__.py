"""Prompts: conversion of every form of a prompt to a request for the engine."""
