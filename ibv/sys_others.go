//go:build !linux || !cgo

package ibv

import "net/netip"

// Without cgo or Linux nothing can be made, so only sysLoad is ever called: every object begins at a
// constructor that calls Available.

const errnoAgain = -1

const errnoNone = 38 // ENOSYS of Linux

func sysLoad() (string, int) { return "this program is built without cgo, or not for Linux", 0 }

func sysForkSafe() bool                                          { return false }
func sysDevices(int) ([]Device, int)                             { return nil, errnoNone }
func sysOpen(string) (cObject, int)                              { return 0, errnoNone }
func sysClose(cObject) int                                       { return errnoNone }
func sysContext(cObject) (Device, int, int)                      { return Device{}, -1, 0 }
func sysQueryDevice(cObject) (Caps, int)                         { return Caps{}, errnoNone }
func sysQueryPort(cObject, int) (Port, int)                      { return Port{}, errnoNone }
func sysQueryGIDs(cObject, int, int) ([]GIDEntry, int)           { return nil, errnoNone }
func sysGetAsync(cObject) (AsyncEventType, uint64, int)          { return 0, 0, errnoNone }
func sysPollable(int) (int, int)                                 { return -1, errnoNone }
func sysAllocPD(cObject) (cObject, int)                          { return 0, errnoNone }
func sysDeallocPD(cObject) int                                   { return errnoNone }
func sysDeregMR(cObject) int                                     { return errnoNone }
func sysAllocMW(cObject) (cObject, int)                          { return 0, errnoNone }
func sysDeallocMW(cObject) int                                   { return errnoNone }
func sysMWKey(cObject) uint32                                    { return 0 }
func sysCreateChannel(cObject) (cObject, int, int)               { return 0, -1, errnoNone }
func sysDestroyChannel(cObject) int                              { return errnoNone }
func sysGetCQEvents(cObject, []uint64) (int, int)                { return 0, errnoNone }
func sysDestroyCQ(cObject) int                                   { return errnoNone }
func sysReqNotify(cObject) int                                   { return errnoNone }
func sysPollCQ(cObject, []WC, int) int                           { return -errnoNone }
func sysDestroyQP(cObject) int                                   { return errnoNone }
func sysCMUseQP(_, _ cObject) int                                { return errnoNone }
func sysCMForgetQP(cObject)                                      {}
func sysModifyQP(cObject, *QPAttr, QPMask) int                   { return errnoNone }
func sysQueryQP(cObject, QPMask) (QPAttr, int)                   { return QPAttr{}, errnoNone }
func sysPostSend(cObject, []SendWR) (int, int)                   { return 0, errnoNone }
func sysPostRecv(cObject, []RecvWR) (int, int)                   { return 0, errnoNone }
func sysCMCreateChannel() (cObject, int, int)                    { return 0, -1, errnoNone }
func sysCMDestroyChannel(cObject)                                {}
func sysCMGetEvent(cObject, uint64) (cmEvent, int)               { return cmEvent{}, errnoNone }
func sysCMCreateID(cObject, uint64) (cObject, int)               { return 0, errnoNone }
func sysCMDestroyID(cObject) int                                 { return errnoNone }
func sysCMBind(cObject, netip.AddrPort) int                      { return errnoNone }
func sysCMResolveAddr(_ cObject, _, _ netip.AddrPort, _ int) int { return errnoNone }
func sysCMResolveRoute(cObject, int) int                         { return errnoNone }
func sysCMListen(cObject, int) int                               { return errnoNone }
func sysCMConnect(cObject, ConnParam) int                        { return errnoNone }
func sysCMAccept(cObject, ConnParam) int                         { return errnoNone }
func sysCMReject(cObject, []byte) int                            { return errnoNone }
func sysCMDisconnect(cObject) int                                { return errnoNone }
func sysCMNotify(cObject) int                                    { return errnoNone }
func sysCMSetOption(cObject, int, []byte) int                    { return errnoNone }
func sysCMInfo(cObject) cmInfo                                   { return cmInfo{} }

func sysRegMR(cObject, uintptr, int, Access) (cObject, uint32, uint32, int) {
	return 0, 0, 0, errnoNone
}

func sysCreateCQ(cObject, int, uint64, cObject, int) (cObject, int) { return 0, errnoNone }

func sysCreateQP(_ cObject, _ uint64, _, _ cObject, _ *QPCap) (cObject, uint32, int) {
	return 0, 0, errnoNone
}
