//go:build !linux || !cgo

package ibv

import "net/netip"

// Where there is no cgo or no Linux, nothing can be made, so nothing but sysLoad
// is ever reached: every object starts at a constructor that calls Available.

const errnoAgain = -1

const errnoNone = 38 // ENOSYS of Linux

func sysLoad() (string, int) { return "this program is built without cgo, or not for Linux", 0 }

func sysForkSafe() bool                                         { return false }
func sysDevices(int) ([]Device, int)                            { return nil, errnoNone }
func sysOpen(string) (handle, int)                              { return 0, errnoNone }
func sysClose(handle) int                                       { return errnoNone }
func sysContext(handle) (Device, int, int)                      { return Device{}, -1, 0 }
func sysQueryDevice(handle) (Caps, int)                         { return Caps{}, errnoNone }
func sysQueryPort(handle, int) (Port, int)                      { return Port{}, errnoNone }
func sysQueryGIDs(handle, int, int) ([]GIDEntry, int)           { return nil, errnoNone }
func sysGetAsync(handle) (AsyncEventType, uint64, int)          { return 0, 0, errnoNone }
func sysPollable(int) (int, int)                                { return -1, errnoNone }
func sysAllocPD(handle) (handle, int)                           { return 0, errnoNone }
func sysDeallocPD(handle) int                                   { return errnoNone }
func sysDeregMR(handle) int                                     { return errnoNone }
func sysAllocMW(handle) (handle, int)                           { return 0, errnoNone }
func sysDeallocMW(handle) int                                   { return errnoNone }
func sysMWKey(handle) uint32                                    { return 0 }
func sysCreateChannel(handle) (handle, int, int)                { return 0, -1, errnoNone }
func sysDestroyChannel(handle) int                              { return errnoNone }
func sysGetCQEvents(handle, []uint64) (int, int)                { return 0, errnoNone }
func sysDestroyCQ(handle) int                                   { return errnoNone }
func sysReqNotify(handle) int                                   { return errnoNone }
func sysPollCQ(handle, []WC, int) int                           { return -errnoNone }
func sysDestroyQP(handle) int                                   { return errnoNone }
func sysCMUseQP(_, _ handle) int                                { return errnoNone }
func sysCMForgetQP(handle)                                      {}
func sysModifyQP(handle, *QPAttr, QPMask) int                   { return errnoNone }
func sysQueryQP(handle, QPMask) (QPAttr, int)                   { return QPAttr{}, errnoNone }
func sysPostSend(handle, []SendWR) (int, int)                   { return 0, errnoNone }
func sysPostRecv(handle, []RecvWR) (int, int)                   { return 0, errnoNone }
func sysCMCreateChannel() (handle, int, int)                    { return 0, -1, errnoNone }
func sysCMDestroyChannel(handle)                                {}
func sysCMGetEvent(handle, uint64) (cmEvent, int)               { return cmEvent{}, errnoNone }
func sysCMCreateID(handle, uint64) (handle, int)                { return 0, errnoNone }
func sysCMDestroyID(handle) int                                 { return errnoNone }
func sysCMBind(handle, netip.AddrPort) int                      { return errnoNone }
func sysCMResolveAddr(_ handle, _, _ netip.AddrPort, _ int) int { return errnoNone }
func sysCMResolveRoute(handle, int) int                         { return errnoNone }
func sysCMListen(handle, int) int                               { return errnoNone }
func sysCMConnect(handle, ConnParam) int                        { return errnoNone }
func sysCMAccept(handle, ConnParam) int                         { return errnoNone }
func sysCMReject(handle, []byte) int                            { return errnoNone }
func sysCMDisconnect(handle) int                                { return errnoNone }
func sysCMNotify(handle) int                                    { return errnoNone }
func sysCMSetOption(handle, int, []byte) int                    { return errnoNone }
func sysCMInfo(handle) cmInfo                                   { return cmInfo{} }

func sysRegMR(handle, uintptr, int, Access) (handle, uint32, uint32, int) {
	return 0, 0, 0, errnoNone
}

func sysCreateCQ(handle, int, uint64, handle, int) (handle, int) { return 0, errnoNone }

func sysCreateQP(_ handle, _ uint64, _, _ handle, _ *QPCap) (handle, uint32, int) {
	return 0, 0, errnoNone
}
