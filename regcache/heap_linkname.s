// An assembly file lets the compiler accept findObject, which has no body.
