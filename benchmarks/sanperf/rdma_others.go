//go:build !linux

package main

import "errors"

func kernelDevices() []rdmaDevice { return nil }

func deviceOf(string) string { return "" }

func rdmaManager() error { return errors.New("rdma_cm: not on this system") }
