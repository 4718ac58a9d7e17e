// Package rdmalink lets a program set which RDMA device a network interface has, for the simulated
// device of test/hwsim, which the kernel does not know. Package verbs looks here before it looks in
// sysfs.
package rdmalink

// Simulated maps interface names to device names, in place of what the kernel reports. nil: the
// kernel's devices are used. It is set before package san is used, and never afterwards.
var Simulated map[string]string

// loopback is the name of the loopback interface in each network namespace of Linux.
const loopback = "lo"

// Loopback reports whether a device serves loopback addresses. None of the kernel's devices does.
func Loopback() bool { return Simulated[loopback] != "" }
