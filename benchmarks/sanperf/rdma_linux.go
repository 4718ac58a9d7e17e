package main

import (
	"fmt"
	"os"
	"slices"

	"github.com/Mellanox/rdmamap"

	"github.com/sanconn/san/provider/verbs"
)

// kernelDevices returns the RDMA devices that the kernel knows, whether or not the libraries list them.
func kernelDevices() (list []rdmaDevice) {
	names := rdmamap.GetRdmaDeviceList()
	slices.Sort(names)
	for _, name := range names {
		files := rdmamap.GetRdmaCharDevices(name)
		slices.Sort(files)
		list = append(list, rdmaDevice{Name: name, Files: files})
	}
	return list
}

// deviceOf returns the RDMA device of an interface, as the provider sees it.
func deviceOf(netdev string) string { return verbs.DeviceOf(netdev) }

// rdmaManager returns an error if this process may not use the kernel's rdma_cm.
func rdmaManager() error {
	f, err := os.OpenFile(rdmamap.RdmaUcmDevice, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("rdma_cm: %w", err)
	}
	return f.Close()
}
