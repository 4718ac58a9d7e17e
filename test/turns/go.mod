module github.com/sanconn/san/test/turns

go 1.26.0
