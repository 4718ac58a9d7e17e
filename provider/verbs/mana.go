package verbs

// mana reports whether the device is Microsoft's, in Azure. Its library posts inline data
// like any other memory (providers/mana/wr.c ignores IBV_SEND_INLINE): the device reads it
// later, when it may already hold the next message.
func (d *device) mana() bool { return d.caps.VendorID == manaVendor }

const manaVendor = 0x1414 // PCI_VENDOR_ID_MICROSOFT, which mana_ib_query_device gives
