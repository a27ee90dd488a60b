"""What the labs measure: rank programs and the numbers they give. No matplotlib here, ranks import these."""
