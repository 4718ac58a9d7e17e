package main

import (
	"fmt"
	"os"
	"slices"

	"github.com/Mellanox/rdmamap"

	"github.com/sanconn/san/provider/verbs"
)

// kernelDevices are those that the kernel has, whatever libraries there are.
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

// deviceOf is the RDMA device of an interface, as the provider sees it.
func deviceOf(netdev string) string { return verbs.DeviceOf(netdev) }

// rdmaManager says whether this process may use the kernel's rdma_cm.
func rdmaManager() error {
	f, err := os.OpenFile(rdmamap.RdmaUcmDevice, os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("rdma_cm: %w", err)
	}
	return f.Close()
}
