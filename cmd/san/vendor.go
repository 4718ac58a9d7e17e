package main

import "errors"

func (b *builder) vendors() bool { return false }

func (b *builder) addToVendor(lib library, replace map[string]string) error {
	return errors.New("vendor: not yet")
}
