package sanconn

// New is what package san gets through internal/newconn.
var New = newConn
