package verbs

// mana says whether the device is Microsoft's, in Azure. Its library posts what is to be
// sent inline as any other memory (providers/mana/wr.c knows no IBV_SEND_INLINE), which
// the device then reads later, when it may have the next message in it.
func (d *device) mana() bool { return d.caps.VendorID == manaVendor }

const manaVendor = 0x1414 // PCI_VENDOR_ID_MICROSOFT, which mana_ib_query_device gives
