// Its presence lets overlay.go declare functions that package net defines.
